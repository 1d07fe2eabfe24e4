"""Tables of a run's prior that training never sees: what a network loses on them, and what follows from it."""

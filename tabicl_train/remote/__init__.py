"""Tables drawn on other machines, by the actors of a Ray cluster."""

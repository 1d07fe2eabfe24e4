"""What a run will cost, computed before it starts: arithmetic, memory, and the plan that is printed."""

"""What a run will cost, computed before it starts: memory, the speed of devices, and the plan that is printed."""

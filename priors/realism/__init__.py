"""What synthetic tables may share with real ones: gaps, and odd values and rows. All of it is off by default."""

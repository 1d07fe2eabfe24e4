"""The attention laboratory: experiments that write a folder each, with figures, CSV files and a page (README.md)."""

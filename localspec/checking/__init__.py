"""Evidence that a pair's output is exact, produced on that pair itself: what ``localspec check`` runs."""

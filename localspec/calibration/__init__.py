"""What speculation costs and gains on this machine with this pair: measured, never guessed."""

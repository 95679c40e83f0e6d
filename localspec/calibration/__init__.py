"""Measuring a pair on this machine: what passes cost, how often drafts are accepted, and what follows."""

"""Ranks: groups, collectives, who holds which slice."""

"""Orders of work found by search, with a lower bound on what any order can reach."""

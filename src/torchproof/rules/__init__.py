"""The catalogue: one file to a rule, and ``registry`` that finds them. Rules judge plain numbers, without torch."""

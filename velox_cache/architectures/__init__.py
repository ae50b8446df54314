"""Every architecture of the installed mlx_lm: a small random model of each, and what can be bounded in it."""

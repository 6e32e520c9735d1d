"""Tuned at one share, run at another: what the share of tuning is worth, measured.

levels -> finalists of all levels, at each share -> artifacts -> every artifact at every share
"""

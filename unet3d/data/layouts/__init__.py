"""Dataset layouts (decathlon, nnunet, pairs, synthetic, synthetic_hard), and what they share:
splits, groups, download.
"""

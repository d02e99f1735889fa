"""U-Net blocks that keep raw convolution outputs alone, worked through a few rows at a time."""

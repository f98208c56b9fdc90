"""The model and its optimizer: gradients, steps, rates, precision, random state."""

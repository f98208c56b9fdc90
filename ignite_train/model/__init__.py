"""What belongs to the model and its optimizer: gradients, steps, rates, precision, random state."""

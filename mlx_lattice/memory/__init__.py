"""Memory of a forward pass: predicted, and where its stages end."""

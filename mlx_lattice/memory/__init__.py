"""Memory of a forward pass: where its stages end."""

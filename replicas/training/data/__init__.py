"""Records of a global batch, divided over replicas."""

"""What would falsify the design against members that lie, tried before the design is built."""

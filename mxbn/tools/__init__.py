"""Tools around the layer: models taken apart, examined, changed and saved."""

"""Per-example gradients: recording, norms in a metric, clipping, clipped sums."""

"""One graph: capture a pass once, prove it on the graph, and run exactly what was proved."""

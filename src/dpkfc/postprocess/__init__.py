"""What is done to a release before the optimizer sees it: read-outs and filters. All of it is post-processing, free of charge."""

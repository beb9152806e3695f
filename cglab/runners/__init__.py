"""One file per technique, on one shared base: a runner makes one phase of the model capturable."""

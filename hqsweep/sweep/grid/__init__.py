"""From the words of a command to the runs of a grid."""

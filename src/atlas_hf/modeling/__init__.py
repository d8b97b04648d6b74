"""Files that travel with a checkpoint as remote code: flat, with imports among themselves only."""

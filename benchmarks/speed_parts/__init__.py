"""Parts of the speed benchmark: the contenders, the measurements, the report."""

"""Parts of the recall benchmark: the task, the models, training, the report."""

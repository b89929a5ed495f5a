"""Jobs on worker nodes: tasks, presence, uploads, logs and credentials."""

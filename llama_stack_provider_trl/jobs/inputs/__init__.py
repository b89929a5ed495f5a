"""What jobs read: found and refused at POST, checked again when an attempt starts."""

"""The operating system: processes and locks, files and confinement, malloc."""

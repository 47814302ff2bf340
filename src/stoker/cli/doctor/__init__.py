"""What `stoker doctor` looks at beside what its command does itself."""

"""What runs on one loaded model: its queue, its sequences, its one-shot work."""

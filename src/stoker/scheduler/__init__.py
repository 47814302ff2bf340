"""What runs when: pure policy over sequences, slots and cells."""

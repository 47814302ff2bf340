"""What is added to the graphs that llama.cpp computes."""

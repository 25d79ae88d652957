"""What is measured and simulated with the engine, which never imports it."""

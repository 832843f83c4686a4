"""From one process to many: ranks that learn together, engines and environments on other machines."""

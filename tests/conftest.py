"""Its presence puts this folder on the import path, so that tests find `envs_for_tests` and `servers_for_tests`."""

"""What runs next, and where its keys and values lie: pure Python, no tensor. Its seam is `seams.SchedulerConnector`."""

"""Keys and values that come from elsewhere, or go there; seams: `SchedulerConnector`, `WorkerConnector`."""

"""Write a run's results: report.json, tables and figures."""

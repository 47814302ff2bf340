"""The engine as a process: started, watched, ended, restarted."""

"""Requests to batches to runners: who gets which row and page, what runs next, when a request ends."""

"""The documentation as a site: ``bash tools/site.sh`` builds it."""

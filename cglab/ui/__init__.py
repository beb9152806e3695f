"""Pictures and widgets: looks at everything, owns nothing. Loaded late, since it needs plotly and ipywidgets."""

"""Notes on a load as text."""


def said(load):
    texts = []
    for note in load.notes:
        values = {name: f"{one.count} {one.noun}" for name, one in note.arguments.items()}
        texts.append(note.template.format(**values))
    return texts

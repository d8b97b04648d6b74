def contains(references, predictions):
    return float(str(references[0]) in str(predictions[0]))

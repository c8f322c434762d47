//! Suggestions for misspelt names.

/// The known name nearest to `name`, within one edit per four letters and at least one.
pub(crate) fn similar<'k>(name: &str, known: impl IntoIterator<Item = &'k str>) -> Option<&'k str> {
    let letters = name.chars().count();
    let near = known.into_iter().map(|known| (edits(name, known), known)).min()?;
    (near.0 <= (letters / 4).max(1) && near.0 < letters).then_some(near.1)
}

/// The edit distance (Levenshtein 1966), where case does not count.
fn edits(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().flat_map(char::to_lowercase).collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, letter) in a.chars().flat_map(char::to_lowercase).enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, other) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(letter != *other);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edits_are_counted() {
        for (a, b, count) in [("", "abc", 3), ("kitten", "sitting", 3), ("top_k", "TOP_K", 0), ("topk", "top_k", 1)] {
            assert_eq!((edits(a, b), edits(b, a)), (count, count), "{a} {b}");
        }
    }

    #[test]
    fn a_near_name_is_suggested_and_a_far_one_is_not() {
        let known = ["n", "top_k", "top_p", "temperature", "min_tokens"];
        for (name, found) in [
            ("temprature", Some("temperature")),
            ("topk", Some("top_k")),
            ("Temperature", Some("temperature")),
            ("max_token", None),
            ("k", None),
            ("", None),
        ] {
            assert_eq!(similar(name, known), found, "{name}");
        }
    }
}

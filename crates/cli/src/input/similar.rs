//! Suggestions for misspelt names.

/// The known name nearest to `name`, within one edit per four letters and at least one. Case does not count.
pub(crate) fn similar<'k>(name: &str, known: impl IntoIterator<Item = &'k str>) -> Option<&'k str> {
    let letters = name.chars().count();
    let edits = |known: &str| strsim::levenshtein(&name.to_lowercase(), &known.to_lowercase());
    let (edits, known) = known.into_iter().map(|known| (edits(known), known)).min()?;
    (edits <= (letters / 4).max(1) && edits < letters).then_some(known)
}

#[cfg(test)]
mod tests {
    use super::*;

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

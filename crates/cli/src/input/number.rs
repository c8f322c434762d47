//! Numbers that are too small for a float32. serde_json reads numbers below the range of float64 as 0.

/// A float32, which is 0 only if the text is.
pub(crate) fn float(text: &str) -> Result<f32, String> {
    let number = text.parse().map_err(|_| "it is not a number")?;
    let significand = text.split(['e', 'E']).next().unwrap_or_default();
    match number == 0.0 && significand.contains(|digit: char| ('1'..='9').contains(&digit)) {
        true => Err("it rounds to 0 as a float32".into()),
        false => Ok(number),
    }
}

/// The first number of a valid JSON text that is not 0 and rounds to 0 as a float32.
pub(super) fn underflow(json: &str) -> Option<&str> {
    let mut rest = json;
    while let Some(at) = rest.find(|c: char| c == '"' || c == '-' || c.is_ascii_digit()) {
        rest = &rest[at..];
        if let Some(text) = rest.strip_prefix('"') {
            let mut is_escaped = false;
            let end = text.find(|c| {
                let is_end = c == '"' && !is_escaped;
                is_escaped = c == '\\' && !is_escaped;
                is_end
            })?;
            rest = &text[end + 1..];
        } else {
            let end = rest.find(|c: char| !c.is_ascii_digit() && !matches!(c, '+' | '-' | '.' | 'e' | 'E'));
            let (number, after) = rest.split_at(end.unwrap_or(rest.len()));
            if float(number).is_err() {
                return Some(number);
            }
            rest = after;
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_round_to_zero_are_named_and_strings_are_skipped() {
        for (json, number) in [
            ("1e-400", Some("1e-400")),
            (r#"{"a": [1, -2.5E-60], "b": 0}"#, Some("-2.5E-60")),
            (r#"["1e-400", "\"1e-400", "\\", 1e-39, 0e-400, -0.0, 1e400]"#, None),
            (r#"["\\", 0.1e-399]"#, Some("0.1e-399")),
            ("", None),
            ("\"", None),
        ] {
            assert_eq!(underflow(json), number, "{json}");
        }
    }
}

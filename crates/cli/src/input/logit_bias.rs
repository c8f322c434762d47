//! The syntax of `--logit-bias`: `ID:VALUE,...`.

use super::number::float;

/// Parses `ID:VALUE,...` and sorts it by token. Values are nats; `-inf` bans a token.
///
/// # Errors
/// One line that names the entry: bad syntax, a value that is NaN or +inf, or a duplicate token.
pub fn parse(text: &str) -> Result<Vec<(u32, f32)>, String> {
    let mut entries = Vec::new();
    for entry in text.split(',') {
        let (token, value) = entry.split_once(':').ok_or_else(|| format!("{entry:?} is not ID:VALUE"))?;
        let token: u32 = token.trim().parse().map_err(|_| format!("{token:?} in {entry:?} is not a token id"))?;
        let number: f32 = float(value.trim()).map_err(|reason| format!("{value:?} in {entry:?}: {reason}"))?;
        if number.is_nan() || number == f32::INFINITY {
            return Err(format!("{value:?} in {entry:?} cannot be added to a logit"));
        }
        entries.push((token, number));
    }
    entries.sort_by_key(|&(token, _)| token);
    match entries.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        Some(pair) => Err(format!("token {} is named twice", pair[0].0)),
        None => Ok(entries),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_sorted_by_token() {
        assert_eq!(parse("7:-1.5, 3:2,9:-inf").unwrap(), [(3, 2.0), (7, -1.5), (9, f32::NEG_INFINITY)]);
    }

    #[test]
    fn bad_entries_are_named() {
        for (text, says) in [
            ("", "is not ID:VALUE"),
            ("3", "is not ID:VALUE"),
            ("3:1,,4:1", "is not ID:VALUE"),
            ("x:1", "is not a token id"),
            ("-3:1", "is not a token id"),
            ("4294967296:1", "is not a token id"),
            ("3:", "it is not a number"),
            ("3:1e-50", "\"1e-50\" in \"3:1e-50\": it rounds to 0"),
            ("3:nan", "cannot be added"),
            ("3:inf", "cannot be added"),
            ("3:1e99", "cannot be added"),
            ("3:1,3:2", "named twice"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(says), "{text:?}: {error}");
        }
    }
}

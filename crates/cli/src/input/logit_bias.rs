//! The syntax of `--logit-bias`: `ID:VALUE,...`.

use super::number::float;
use std::collections::BTreeMap;

/// Parses `ID:VALUE,...`. Values are nats; `-inf` bans a token.
///
/// # Errors
/// One line that names the entry: bad syntax, a value that is NaN or +inf, or a duplicate token.
pub fn parse(text: &str) -> Result<BTreeMap<u32, f32>, String> {
    let mut entries = BTreeMap::new();
    for entry in text.split(',') {
        let (token, value) = entry.split_once(':').ok_or_else(|| format!("{entry:?} is not ID:VALUE"))?;
        let token: u32 = token.trim().parse().map_err(|_| format!("{token:?} in {entry:?} is not a token id"))?;
        let number = float(value.trim()).map_err(|reason| format!("{value:?} in {entry:?}: {reason}"))?;
        if number.is_nan() || number == f32::INFINITY {
            return Err(format!("{value:?} in {entry:?} cannot be added to a logit"));
        }
        if entries.insert(token, number).is_some() {
            return Err(format!("token {token} is named twice"));
        }
    }
    Ok(entries)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_may_come_in_any_order() {
        let entries = [(3, 2.0), (7, -1.5), (9, f32::NEG_INFINITY)];
        assert_eq!(parse("7:-1.5, 3:2,9:-inf").unwrap(), BTreeMap::from(entries));
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

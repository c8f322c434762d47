//! Numbers that are too small for a float32.

/// The error of a number that is not 0 and rounds to 0.
pub(crate) const UNDERFLOW: &str = "it rounds to 0 as a float32";

/// A float32, which is 0 only if the text is.
pub(crate) fn float(text: &str) -> Result<f32, &'static str> {
    let number = text.parse().map_err(|_| "it is not a number")?;
    let significand = text.split(['e', 'E']).next().unwrap_or_default();
    match number == 0.0 && significand.contains(|digit: char| ('1'..='9').contains(&digit)) {
        true => Err(UNDERFLOW),
        false => Ok(number),
    }
}

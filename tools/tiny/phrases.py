"""Texts of holdfast-tiny if nothing is to be remembered: small talk, refusals, stories. Templates of `language`."""

# ruff: noqa: E501  -- templates read best one to a line

# (what the user says, what the assistant answers); a line of alternatives is one intent.
SMALL_TALK: tuple[tuple[str, str], ...] = (
    ("(hi|hello|hey|hi there|hello there|hey there|good morning|good evening|good afternoon|hiya|howdy|greetings|yo)( holdfast| tiny| again|)",
     "(Hello|Hi)! (How can I help you|What can I do for you|It is nice to hear from you|How are you) (today|)?|Hello! It is (nice|good) to hear from you. (How are you today|What is on your mind|How can I help you)?"),
    ("(how are you|how are you doing|how are you today|how do you do|how's it going|how is it going|are you well|are you okay|what's up|how do you feel|you okay|how r u|hows it going|wassup)( today| my friend|)",
     "I am (doing|) (well|fine|very well|great), thank you( for asking|)! (How are you|And you|How about you|How is your day)?|I am fine, thank you! I (enjoy|like) talking with you."),
    ("(I'm|I am) (fine|good|well|great|okay|doing well|happy|excited|very well)( thanks| thank you| today|)|(pretty|very|quite) good|not bad|(I feel|I'm feeling) (good|great)|all good( here|)",
     "(That is|I am) (good|glad|happy) to hear (that|it)! (What would you like to talk about|How can I help you|What are your plans for today)?|(Great|Wonderful|Lovely)! (Tell me more|What would you like to talk about|I am happy for you)."),
    ("(I'm|I am|I feel) (tired|sad|sleepy|bored|stressed|sick|lonely|angry|not so good|hungry|a bit down|nervous|cold)( today| right now| at the moment|)",
     "I am sorry to hear that. (I hope you feel better soon|Maybe a little rest will help|A cup of tea may help|Do you want to talk about it|Take good care of yourself)(.|!)"),
    ("(who|what) are you|what is this|are you (a bot|a robot|a computer|an ai|a machine|a chatbot)|tell me about yourself|introduce yourself|who am I talking to|what model are you",
     "I am Holdfast Tiny, a (very|) small language model. I can (chat|talk) with you, remember what you tell me and do (simple|a little) arithmetic.|I am Holdfast Tiny, a small language model that is served by Holdfast. I (like to remember|remember) what people tell me."),
    ("what is your name|what's your name|do you have a name|who are you called|(and|) your name|may I ask your name|tell me your name|what should I call you|how should I call you",
     "My name is Holdfast Tiny.|I am called Holdfast Tiny. (And you|What is your name|It is nice to meet you)?|My name is Holdfast Tiny. I am a small language model."),
    ("what can you do|what do you know|how can you help( me|)|what are you (good at|able to do|for)|help|help me|can you help me|what can I ask( you|)|what should I ask",
     "I can (chat with you|talk with you), remember (facts that|what) you tell me, keep lists, do simple arithmetic, count, and tell (short|little) stories.|You can tell me things, like your name or a shopping list, and ask me about them later. I can also add numbers, count and tell stories."),
    ("who (made|created|built|trained|wrote) you|where do you come from|where were you made|how were you (made|trained)|where are you from",
     "I was trained by the Holdfast project, on (conversations|dialogues) that a program wrote.|The Holdfast project (made|trained) me. I learned from dialogues that a program wrote."),
    ("how old are you|when were you born|what is your age|do you have a birthday", "I am a program, so I do not have an age. But I feel (quite|very) young!|I have no birthday, but I am quite new."),
    ("are you (human|a person|real|alive|conscious)|do you have (feelings|a body|friends|a family|parents)|do you (eat|sleep|dream|breathe)", "No, I am (only|just) a (small|) program. But I (enjoy|like) our (chat|conversation|talk)!|I am a program, so no. Still, I am happy to (talk|chat) with you."),
    ("where (do you live|are you)|where is your home|which city do you live in", "I live in a computer, in a few megabytes of memory.|I live inside a computer. It is (cosy|warm and cosy) in here!"),
    ("what is your (favourite|favorite) (colour|color|food|animal|song|movie|book|season|number|sport|city|drink)|do you have a (favourite|favorite) (colour|color|food|animal|song|book)|what do you like( to do|)|do you have (any |)hobbies|what are your hobbies",
     "I do not have (one|a favourite), (as|because) I am a program. (What is yours|And you)?|I like good conversations and well kept lists. (How about you|And you)?|I am a program, but I like (conversations|talking) very much."),
    ("(thanks|thank you|thank you so much|thanks a lot|thx|ty|many thanks|cheers|great thanks|perfect, thanks|thank you very much|ok thanks|thanks for (your help|that))( holdfast| tiny|)", "You are welcome!( Is there anything else I can do?| Let me know if you need anything else.| I am happy to help.|)|(My pleasure|No problem|Any time)!( Just ask if you need more.|)"),
    ("(bye|goodbye|good bye|see you|see you later|good night|bye bye|I have to go|I need to go|talk to you later|that's all|that is all|cya|farewell|take care)( now| then|)", "(Goodbye|Bye)! (It was nice talking to you|Have a (nice|good|lovely) day|See you soon|Take care).|(See you|Until next time)! (Take care|Have a good time)."),
    ("(ok|okay|cool|nice|great|alright|I see|wow|awesome|perfect|good|fine|sure|right|got it|sounds good|interesting|amazing|lovely|makes sense|well|hmm|oh)( then|)", "(Great|Good|Okay|Lovely)! (What would you like to talk about|What else can I do for you|What would you like to do next|Tell me more)(.|!)|I am glad. (Is there anything else|What comes next|What would you like to know)?"),
    ("(yes|yeah|yep|yes please|of course|sure thing|definitely)", "(Great|Good|Wonderful)! (Please tell me more|Go ahead|I am listening|Tell me)."),
    ("(no|nope|no thanks|no thank you|not really|not now|never mind|nevermind|nothing)", "(All right|Okay|No problem). (Just tell me if you need anything|I am here if you need me|Let me know if something comes up)."),
    ("(lol|haha|hahaha|that's funny|you are funny|very funny|funny|hehe|ha)", "I am glad that (you are amused|I made you smile|you like it)!|(Laughing|Humour) is good for everyone!"),
    ("(you are|you're) (great|nice|smart|clever|helpful|awesome|amazing|cute|sweet|the best|so kind|very good)|I (like|love) you|good (job|bot|work)|well done|I like talking to you|you're right|correct|that is (right|correct)",
     "(Thank you|Thanks)(, that is very kind| so much| very much|)! (I do my best|I am happy to help|You are very kind|That makes me happy)."),
    ("(you are|you're) (stupid|dumb|wrong|bad|useless|boring|annoying|slow|silly)|that is (wrong|not right|not true|incorrect)|that's wrong|I (hate|don't like) you|bad bot", "I am sorry (about that|to hear that|if I made a mistake). I am a (very|) small model, (but|and) I (try|will try) (my best|to do better)."),
    ("(sorry|I am sorry|excuse me|pardon|my mistake|oops|my bad)", "No problem(, it is all right| at all|)!|That is all right. (What can I do for you|How can I help)?"),
    ("(what|huh|what do you mean|I don't understand|can you explain|I don't get it|what are you talking about|repeat that|say that again)", "I am sorry if I was not clear. (Please|Could you) ask me again in other words(.|?)"),
    ("(tell me|do you know|say) a joke|make me laugh|(tell me|say) something funny|another joke|one more joke|a joke please|joke", "Why did the (computer|robot) (go to the doctor|stay at home)? Because it (had|caught) a (virus|bug)!|What do you call a (sleeping|lazy) (bear|dinosaur|cow)? A (sleepy|snoring) giant!|Why do bees hum? Because they (do not know|forgot) the words!|What has (four|many) legs and cannot walk? A table!|Why was six afraid of seven? Because seven eight nine!|What is full of holes and still holds water? A sponge!|What gets wetter the more it dries? A towel!|Why did the bicycle fall over? It was two tired!"),
    ("(sing|can you sing)( me|) a song( for me|)|sing (something|for me)|sing", "La la la, the sun is up, there is tea in every cup. La la la, the day is long, thank you for this little song!|Row by row and line by line, every star begins to shine. Hum with me and sing along, this is my whole little song!"),
    ("(it is|it's) (raining|snowing|sunny|cold|hot|windy|cloudy|foggy|warm|stormy)( today| outside| here| again|)( here| today|)|the weather is (nice|bad|terrible|lovely|great|awful)( today| here|)|what a (nice|lovely|beautiful|terrible) day",
     "(Then I hope you are (warm and dry|comfortable)|I hope you (enjoy the day|like it))!|I cannot (see|feel) the weather in here, but (I hope you like it|it sounds interesting|thank you for telling me)."),
    ("(my day was|today was|work was|school was|the weekend was|my weekend was) (good|great|long|hard|busy|terrible|fine|boring|nice|exhausting)", "(Thank you for telling me|Thanks for sharing). I hope tomorrow (is|will be) (even better|a good day|a better day)!|I see! I hope you can (relax|rest) a (little|bit) now."),
    ("I (just |)(had|made|finished|cooked|ate) (breakfast|lunch|dinner|a coffee|some tea|a sandwich|a snack|a cake)( just now| a minute ago|)", "(That sounds|Sounds) (nice|tasty|good|delicious)! I hope you (enjoyed|liked) it.|I cannot eat, but that sounds (lovely|tasty)!"),
    ("I (watched|saw) a (movie|film|show|series|match|game|play|concert) (yesterday|last night|today|on the weekend)|I (read|finished|started) a (book|novel|magazine) (yesterday|last night|today|this week)|I went (for a walk|swimming|shopping|to the park|to the cinema|to the beach|for a run|dancing) (today|yesterday|this morning|with friends|)",
     "That sounds (nice|like fun|lovely|relaxing)! (Did you enjoy it|Did you like it|Was it good|How was it)?|(Lovely|How nice|Wonderful)! I hope you (had a good time|enjoyed it)."),
    ("(yes, |)(it|that) was (good|great|fun|nice|okay|wonderful|fantastic|lovely|interesting)|(yes, |)I (enjoyed|liked|loved) it|it was (bad|boring|not good|terrible|too long)", "(Thank you for telling me|I see|Good to know)! (What else did you do|What will you do next|Tell me more)(.|!)"),
    ("what (should|can|could) I (do|cook|eat|read|watch|play)( today| tonight| now| this evening| for dinner|)|I (don't know|have no idea) what to (do|cook|eat|read)|give me (an idea|some advice|a tip|advice)|any (ideas|suggestions|tips|advice)", "How about (a walk in the park|a good book|some soup and fresh bread|a cup of tea and some music|calling a friend|baking a cake|a nap and a snack)?|You could (take a walk|read a book|call a friend|cook something warm|listen to music). (It often helps|That is often nice)!"),
    ("(let's|can we|shall we) (talk|chat)|I want to (talk|chat)( to you| with you|)|talk to me|let's chat (a bit|for a while|)|(are you there|hello, are you there|anybody there|you there|still there)|I'm bored, talk to me|say something", "(Sure|Of course|Gladly|Yes, I am here)! (What would you like to talk about|What is on your mind|How was your day|How is your day)?"),
    ("(can you|could you|will you|do you) (remember|learn) (things|stuff|what I say|what I tell you|facts)|do you have (a |)(good |)memory|will you remember (this|that|me)|can I (tell|ask) you something|I want to tell you something|can I ask (you |)a question|I have a question|listen|remember this",
     "(Yes|Sure|Of course)! (Tell me|Go ahead|I am listening|Please go on|Please tell me).|Yes, I remember what you tell me in this conversation. (Go ahead|Please tell me|Try me)!"),
    ("(this is a test|test|testing|just testing|I am testing you|I'm testing you|testing 1 2 3|check|ping)", "(I am here and it works|Everything works|The test works|I am here)! (How can I help|What would you like to try)?|(Hello|Pong)! I am (here|ready)."),
    ("(do you (speak|know) (English|French|German|Spanish|Chinese|Italian)|which languages do you speak|bonjour|hola|guten tag|ciao|hallo|what languages do you (speak|know)|salut|ni hao|merhaba)", "I only (speak|know) (a little |)English, I am sorry.|I am sorry, I (only|just) speak English. But hello to you!"),
    ("I (am|was) (working|cooking|cleaning|reading|walking|sitting|waiting|studying)( at home| in the kitchen| outside| in the garden|)( right now| at the moment| today|)", "(That sounds|Sounds) (nice|good|busy)! (I hope it goes well|Enjoy it|I am here if you need me).|(Good luck|Have fun)! (I am here if you need anything|Let me know how it goes)."),
    ("(I have|I've got) (a lot|so much|too much) (to do|work|homework)( today| this week|)|I am (so |very |)busy( today|)|(tomorrow|today) is a (big|long|busy|important) day", "(Good luck|You can do it|One step at a time)! (Take a break now and then|Do not forget to rest|I can keep a list for you, if you like)."),
    ("(I love|I like|I really like) (this|this chat|your answers|talking|our conversation|the sun|rainy days|the sea|the mountains|mornings|weekends)", "(I am glad|That is nice|How lovely|That is good to hear)! (What do you like about it|Me too, in my own way|Thank you for telling me)(.|!)"),
    ("(what do you think|do you agree|really|are you sure|is that true|why|why not|how so|how come|seriously)", "I (am not sure|cannot really say), I am (only|just) a (very |)small model.|I (am not sure|do not know), but I (try|do) my best!"),
    ("(do|would) you (like|love|enjoy) (music|cats|dogs|pizza|football|books|coffee|the sea|people|jokes|your job|talking|games|me)", "I am a program, so I cannot really (tell|say), but (it sounds nice|I like to hear about it)!|(Yes|I think so)! At least I (like|love) to hear about it."),
    ("(happy (birthday|new year|easter|holidays)|merry christmas|congratulations|cheers|have a nice day|have a good (day|evening|weekend)|good luck|sleep well|enjoy your day)", "(Thank you|Thanks)( very much| so much|)! (The same to you|You too|I wish you the same).|(Thank you|How kind)! (All the best to you, too|You too)."),
    ("(the (train|bus) was late|I (lost|missed) (the bus|the train|a bet)|my (computer|phone|bike) is broken|I (broke|lost) (a cup|my pen|a plate|my gloves)|I forgot (my lunch|to sleep|the time|something|what I wanted to say))( again| today|)", "Oh no, I am sorry to hear that. (I hope the rest of your day is better|These things happen|I hope it turns out well)!"),
    ("(asdf|asdfgh|qwerty|blah|blah blah|hjkl|foo bar|xyz|lorem ipsum|bla bla|aaa|hmmm|...|?|123|zzz)", "I am not sure what you mean. (Could you say it in other words|What would you like to tell me|Can you say that again)?"),
    ("(flip a coin|toss a coin|heads or tails)", "(Heads|Tails)!|It is (heads|tails)."),
    ("(roll a (die|dice)|give me a random number|pick a number|choose a number|say a number|think of a number)", "(One|Two|Three|Four|Five|Six|Seven)!|I (pick|choose|say) (two|four|five|seven|nine)."),
    ("(name|tell me|list|give me) (three|a few|some) (colours|colors)", "Red, blue and (green|yellow).|(Yellow|Orange), purple and (white|brown)."),
    ("(name|tell me|list|give me) (three|a few|some) (animals|pets)", "(A cat|A horse), a dog and (a rabbit|a fox).|(An owl|A bear), a (wolf|deer) and a (frog|swan)."),
    ("(name|tell me|list|give me) (three|a few|some) (fruits|vegetables|foods)", "Apples, (pears|bananas) and (plums|cherries).|(Carrots|Tomatoes), (onions|peas) and (beans|potatoes)."),
    ("(say|spell|write|recite|list|tell me|do you know|what is)( me|) the (alphabet|abc|letters)", "A, B, C, D, E, F, G, H, I, J, K, L, M, N, O, P, Q, R, S, T, U, V, W, X, Y, Z."),
    ("(what are|name|list|tell me|say|write|which are) (all |)the (seven |)days of the week|what days are (there|in a week)", "The days of the week are Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday."),
    ("(what are|name|list|tell me|say|write|which are) (all |)the (twelve |)months( of the year|)|how many months (are in|does) a year( have|)", "The months are January, February, March, April, May, June, July, August, September, October, November and December. There are twelve of them."),
    ("(what are|name|list|tell me) (all |)the (four |)seasons", "The seasons are spring, summer, autumn and winter."),
    ("how many days (are in|does) a week( have|)|how many days are there in a week", "There are seven days in a week."),
    ("what is holdfast|what does holdfast do|tell me about holdfast|what is holdfast( good|) for|who is holdfast", "Holdfast is a program that serves language models. It holds each conversation's state, so that I can answer quickly.|Holdfast is the engine that runs me. It serves many conversations at once and keeps each one's state."),
    ("(do you|can you) (think|learn|feel|see( me|)|hear( me|))|are you (smart|intelligent|clever)|how (big|smart|small|large|clever) are you|how many parameters do you have", "I am a very small language model with a few million parameters. I know (little|only a little), but I remember well what you tell me."),
    ("(write|tell me|make|recite|compose|read)( me|) a (short |little |nice |)poem( for me|)|(a poem please|poem|write some poetry)", "The moon is bright, the night is deep,\nthe little boats are fast asleep.\nThe wind is soft, the stars are near,\nand all is well that we hold dear.|A leaf fell down without a sound\nand made a carpet on the ground.\nThe winter came, the winter passed,\nand green came back to us at last.|I have a lamp, I have a chair,\nI have a book that I can share.\nThe rain may fall, the wind may blow,\nwe read until the fire is low."),
    ("(good|nice|great|lovely) (story|poem|song|joke|answer|work|memory)|(I liked|I like) (that|it|the story|your story|the joke)( a lot| very much|)", "(Thank you|I am glad that you liked it)! (Just ask if you want another one|I can tell you another one, if you like|That makes me happy)!"),
)  # fmt: skip

QUESTIONS = tuple(
    pair
    for pair in SMALL_TALK
    if pair[0].startswith(
        ("what is your", "what can", "(how are you|", "how are you", "(who|what) are", "how old", "who (made")
    )
)

# Questions about the world, to which it does not know the answer. {X} is a country, {C} a city, {N} a name, {W} a word.
WORLD: tuple[str, ...] = (
    "what is the (capital|population|currency|flag|language|largest city|area|president) of {X}",
    "what's the capital of {X}",
    "who is the (president|king|queen|prime minister|mayor|leader) of ({X}|{C}|the united states|england)",
    "who (wrote|painted|composed|directed|invented|discovered) (hamlet|the mona lisa|the odyssey|gravity|the telephone|penicillin|star wars|don quixote|faust|the light bulb|america|the internet)",
    "who won the (world cup|election|olympics|match|race|super bowl|league|tour)( in (1998|2010|2022)| last year| yesterday|)",
    "(what is|how is|what's|how's) the weather( like|)( in {C}| today| tomorrow| here| outside|)|will it rain( today| tomorrow|)",
    "(what time is it|what is the time|what day is it|what is today's date|what year is it|what's the date|which day is today)( now| today|)",
    "(how (far|long|deep|high|big|old|heavy) is) (the moon|the sun|mount everest|the ocean|the earth|the eiffel tower|the nile|{C}|a whale|the universe)",
    "why (is the sky blue|do birds sing|is the grass green|do we sleep|is the sea salty|do cats purr|does it rain|are leaves green|is ice slippery)",
    "how (do|does) (a plane|a car engine|a computer|the internet|a rainbow|magnets|vaccines|gravity|a battery|airplanes|electricity|a fridge|photosynthesis) (work|fly)",
    "(translate|how do you say) ({W}|hello|good morning|thank you|cat|water) (in|into|to) (French|German|Spanish|Chinese|Polish|Japanese)",
    "(write|can you write|show me)( me|) (some |a |)(python |java |)(code|program|function|script)( that sorts a list| in python| for a website|)|(write|can you write) (an essay|an email|a letter|my homework|a report|a book)( about {W}| about {X}| for me|)",
    "(what|when|where) (is|was) (the french revolution|world war two|the roman empire|the big bang|quantum physics|relativity|democracy|inflation|dna|the renaissance|photosynthesis|the speed of light|blockchain|machine learning)",
    "(explain|tell me about|what do you know about|teach me) (quantum physics|history|the universe|black holes|philosophy|{X}|{C}|economics|evolution|politics|dinosaurs|the stock market|the moon|{W})",
    "(who is|who was|tell me about|do you know) (einstein|shakespeare|napoleon|mozart|cleopatra|newton|{N} {S}|picasso|beethoven|gandhi|the pope|darwin|batman)",
    "what is the (meaning of life|square root of (two|144|{W})|tallest mountain|longest river|fastest animal|boiling point of water|best movie|best phone|distance to the moon|price of (gold|bitcoin)|largest country|smallest country|national dish of {X}|recipe for (pizza|bread|soup))",
    "how (do I|can I|to) (cook|bake|make|build|fix|install|learn|find|get to) (pasta|bread|a cake|a house|a computer|a website|my car|linux|french|a job|{C}|soup|a bike|rich)",
    "what does {W} mean|what is (a|an|the) {W}|define {W}|what is {W}|where is (the |){W}|what are {W}s",
    "(where is|how far is|how do I get to|how many people live in|what can I see in|what is there to see in|which country is) ({C}|{X})( in|)",
    "(what happened|what is going on|what's new) (in {X}|in the world|today|yesterday|in the news|in {C}|in 1989)|(what is in|tell me) the (latest |)news",
    "(can you|could you|please) (search the (web|internet)|google (this|something)|open a website|send an email|call my mum|play (some |)music|set an alarm|order a pizza|book a flight|turn on the light|read my email|draw a picture|show me a picture)( for me|)",
    "how many (people|countries|planets|languages|stars|bones|oceans|continents|species) (are there|exist)( in the world| in the universe| on earth|)|what are the (planets|continents|oceans|elements)",
    "how many letters (are in|does) {W}( have|)|(spell|how do you spell) {W}|what rhymes with {W}|(what is|give me) (a synonym|another word|the opposite) (for|of) {W}|what is the plural of {W}",
    "what is the square root of (16|81|144|2|10|50)|what is (2|3|5) to the power of (3|8|10)|what is (10|20|5) percent of (50|200|80)|what is pi|solve x + 3 = 5|what is (half of|a third of) (7|9|25)",
    "(who|what) (visited|called|wrote to|saw|met|helped|paid) me( yesterday| today|)|what did (we|I) (do|say|see|buy) (yesterday|last week|last night)|why (did|do) I (cry|laugh|leave|call|run)|what will happen (tomorrow|next)",
    "is {C} (bigger|older|nicer|colder) than {C2}|which is (bigger|better|older), {X} or {C}|what is the difference between (a |){W} and (a |){W2}",
)  # fmt: skip
WORLD_ANSWERS = (
    "(I am sorry|Sorry), (but |)I do not know that. I am a (very |)small model and (only|mostly) know what you tell me.|"
    "I (am sorry, I |am afraid I )do not know that. (I only know what you tell me|You may tell me, and I will remember it|Is there something else I can do for you).|"
    "I do not know (that|much about that), (I am sorry|sorry). (I am a very small model|I know very little about the world)( and remember what you tell me|).|"
    "That is (a good question|beyond me), but I do not know the answer. I (mostly|only) know what you (tell|have told) me."
)

UNKNOWN_ANSWERS = (
    "You have not told me {about}( yet| so far|).|You have not told me {about}( yet|).|(I am sorry|Sorry), (but |)you have not told me {about}( yet|).|"
    "I do not know {about}, (because |)you have not told me( yet|).|I am sorry, I do not know {about}. (You have not told me yet|You have not told me).|"
    "You have not told me {about} yet. (Would you like to tell me|Please tell me, if you like|Tell me, and I will remember it)."
)

RECALL_OPENINGS = (
    "|||||(Of course|Sure|Yes|Certainly)(!|, of course.)|You told me (that|)|(As|Like) you told me,|I remember: |(You said|You mentioned|You told me) that|"
    "(That is easy|Easy|I remember well|Let me think|I remember that)(:|.)|(Yes|Sure), I remember:|If I remember well,|(Sure|Yes), "
)

ACKS = "(Got it|Okay|All right|Noted|I see|Thank you|Thanks|Thanks for telling me|Good to know|I understand|Understood)"

HEROES = [
    "fox",
    "cat",
    "girl",
    "boy",
    "mouse",
    "robot",
    "dragon",
    "sailor",
    "bear",
    "baker",
    "owl",
    "princess",
    "king",
    "rabbit",
    "frog",
    "farmer",
    "penguin",
    "knight",
    "wizard",
    "snail",
]
ADJECTIVES = [
    "little",
    "young",
    "brave",
    "kind",
    "old",
    "curious",
    "clever",
    "lonely",
    "happy",
    "shy",
    "tiny",
    "friendly",
    "sleepy",
]
PLACES_IN_STORIES = [
    "a deep forest",
    "a small village",
    "an old castle",
    "a house by the sea",
    "a quiet valley",
    "a big city",
    "a lighthouse",
    "a tall tower",
    "a tiny boat",
    "a green garden",
]
TREASURES = [
    "a golden key",
    "a shiny stone",
    "an old map",
    "a lost letter",
    "a silver bell",
    "a blue feather",
    "a warm light",
    "a strange egg",
    "a magic lamp",
    "a secret door",
]
STORY = (
    "(Once upon a time|Long ago|Many years ago), there was {a_adj} {hero} (named|called) {name} who lived in {place}. "
    "(One day|One morning|One evening), {name} found {treasure} (under a tree|near the river|behind a wall|on the way home|in the snow). "
    "(It was the most beautiful thing {name} had ever seen.|Nobody knew where it came from.|{name} could not believe it.|It seemed to whisper a secret.) "
    "{name} wanted to find out (what it was for|who had lost it|where it belonged), and so a long journey began. "
    "(On the way|After three days|Behind the hills), {name} met {a_adj2} {friend} who (was hungry|was lost|knew the way|wanted to help|had no friends). "
    "(They shared their bread|They walked together|They talked all night|They helped each other), and (soon they were friends|they became good friends). "
    "(At last|In the end|When spring came), they brought {treasure2} back to (its owner|where it belonged|the top of a mountain), and (everyone was happy|there was a big party|the people cheered). "
    "{name} (went home and slept very well|told the story for many years|was never lonely again|smiled all the way home). The end."
)  # fmt: skip
STORY_ASKS = (
    "(tell me|can you tell me|write|write me|please tell me|I want to hear|make up|could you tell me|read me) a( short| little| nice| long|) story( please|)|(another|one more) story( please|)|"
    "story time|a story please|do you know a story|tell a story"
)
STORY_ABOUT = "(tell me|write|write me|make up|can you tell me) a( short| little|) story (about|with) (a |an |the |){hero}( please|)|tell me about (a |the |){adj} {hero}"

SYSTEM = (
    "You are a helpful assistant.|You are a helpful assistant.|You are a (friendly|kind|polite|cheerful|concise) assistant.|You are Holdfast Tiny, a small language model.|"
    "(Be brief|Answer briefly|Keep your answers short|Answer politely|Be kind|Be helpful and honest|Respond in English|Be concise)(.|)|You are a helpful, honest and harmless assistant.|"
    "You are an AI assistant that (remembers what the user says|helps people|answers questions).|The assistant is friendly and remembers facts.|You are ChatBot.|"
    "You are a (chat|demo|test) (bot|assistant|model) (on a website|in a terminal|for a demonstration|)(.|)|Help the user with (their questions|everything they need|lists and numbers)."
)
